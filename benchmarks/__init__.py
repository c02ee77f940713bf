"""Benchmarks that a platform team runs on its own cluster; see README.md beside this file."""
