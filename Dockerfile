# docker build -t minidl .                    for a GPU, with kernels compiled for compute capability 9.0 (ARCH)
# docker build -t minidl:cpu --target cpu .   without one

FROM python:3.11-slim-bookworm AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm AS base
# Any user may be chosen with --user: all can write where commands do.
ENV HOME=/home/minidl
RUN useradd --create-home --uid 1000 minidl && install -d -m 777 /work && chmod 777 "$HOME"
COPY --from=wheel /wheels /wheels
COPY constraints.txt /wheels/
WORKDIR /work
ENTRYPOINT ["minidl"]
CMD ["doctor"]

FROM base AS cpu
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir -c /wheels/constraints.txt "$(echo /wheels/minidl-*.whl)[plots,arrow]"
USER 1000

FROM base AS cuda
# Triton builds its launcher with a compiler when it first meets a GPU.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir -c /wheels/constraints.txt "$(echo /wheels/minidl-*.whl)[plots,arrow]"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility TRITON_CACHE_DIR=/home/minidl/.triton/cache
USER 1000
ARG ARCH=90
RUN minidl doctor --warm --arch "$ARCH" && chmod 777 "$TRITON_CACHE_DIR"
