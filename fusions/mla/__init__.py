"""The recogniser of multi-head latent attention."""
