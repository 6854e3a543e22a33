"""Architectures: hyperparameters and weights to unfused graphs."""
