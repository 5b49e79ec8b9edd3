"""A pipeline as one program for all devices (SPMD): stages, ticks, and sums of gradients."""
