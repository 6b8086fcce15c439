"""Operations under NVIDIA's compute-sanitizer, on a GPU."""
