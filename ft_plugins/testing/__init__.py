"""What tests, benchmarks and the quickstart share: fork server, kills at points, golden comparison."""
