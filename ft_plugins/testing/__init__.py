"""What tests, benchmarks and the quickstart share: fork server, emulated nodes, failure stories, golden comparison."""
