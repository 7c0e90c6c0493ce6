"""Attention: the contract that backends fulfil, the choice of one, and the devices they run on."""
