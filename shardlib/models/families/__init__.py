"""Families of models on Hugging Face: what the keys of a `config.json` mean, dense and sparse."""
