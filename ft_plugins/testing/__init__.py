"""Shared by tests, benchmarks and the quickstart: fork server, emulated nodes, failure stories, golden comparison."""
