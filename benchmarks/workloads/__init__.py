"""What single benchmarks run, judge and draw. Benchmarks and tests import it as `workloads`."""
