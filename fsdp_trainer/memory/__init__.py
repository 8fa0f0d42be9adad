"""What training takes from a device: measured here; estimated, simulated and planned by what comes later."""
