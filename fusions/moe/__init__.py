"""The recogniser of mixtures of experts: router, experts in any form, shared expert."""
