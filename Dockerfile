# weightwired and wwctl on Debian, with Debian's UCX (1.13: verbs, without CUDA). Kept to what buildah and docker both know.
#   docker build -t weightwire:0.1.0 .
# A production target with UCX 1.22 for RDMA between GPUs is not part of this version.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      g++ cmake ninja-build pkg-config mold ccache \
      libgrpc++-dev protobuf-compiler-grpc libprotobuf-dev protobuf-compiler libboost1.81-dev prometheus-cpp-dev \
      libexpected-dev libspdlog-dev libfmt-dev libcli11-dev nlohmann-json3-dev libxxhash-dev libyaml-cpp-dev \
      libsqlite3-dev libssl-dev libucx-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
ARG JOBS=
# Another folder than the builder's own cache: one that is mounted from outside. To ccache LANG is part of a command.
ARG CCACHE_DIR=/root/.cache/ccache
ENV CCACHE_BASEDIR=/src CCACHE_NOHASHDIR=1 LANG=C.UTF-8
RUN --mount=type=cache,target=/root/.cache/ccache \
    cmake --preset release -DWEIGHTWIRE_TESTS=OFF -DWEIGHTWIRE_BENCH=OFF \
    && cmake --build build/release -j "${JOBS:-$(nproc)}" --target weightwired wwctl weightwire_ucx \
    && mkdir /out \
    && cp build/release/bin/weightwired build/release/bin/wwctl build/release/bin/libweightwire_checkpoint.so "$(find build/release -name libweightwire_ucx.so)" /out \
    && strip /out/*

FROM ${BASE} AS cpu
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      libgrpc++1.51 libprometheus-cpp-core1.0 libspdlog1.10 libsqlite3-0 libssl3 libxxhash0 libyaml-cpp0.7 \
      libucx0 ibverbs-providers \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir -p /run/weightwire /var/lib/weightwire \
    && chown 10001:10001 /run/weightwire /var/lib/weightwire \
    && dpkg-query -W -f '${Package} ${Version} ${Architecture}\n' > /usr/share/weightwire-packages.txt
COPY --from=build /out /usr/local/bin
COPY LICENSE /usr/share/doc/weightwire/
LABEL org.opencontainers.image.title="weightwire" \
      org.opencontainers.image.description="Moves weights from an RL trainer fleet to a rollout fleet" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
USER 10001:10001
# Alive where the process is told to listen with http on port 7412, its default. Kubernetes has probes of its own.
HEALTHCHECK --interval=10s --timeout=6s --start-period=60s \
  CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/7412 && printf 'GET /healthz HTTP/1.0\\r\\n\\r\\n' >&3 && grep -q '^alive' <&3"]
ENTRYPOINT ["weightwired"]
