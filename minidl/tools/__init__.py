"""What measures and shows kernels: benchmarks, the search for tiles, the offline compile, profiles, drawn graphs."""
