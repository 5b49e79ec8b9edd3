"""A repository for Triton's inference server, with a model's programs and weights."""
