"""ray-pools."""
