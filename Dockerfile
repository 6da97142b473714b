# weightwired, wwctl and the Python package with its checkpoint commands on Debian 12, for two kinds of hosts. Kept to what buildah
# and docker both know.
#   docker run --rm weightwire:0.1.0 demo                 # 4 trainer ranks, 3 engines, on this machine
#   docker build --target cpu -t weightwire:0.1.0-cpu .   # Debian's UCX 1.13: verbs, without CUDA
#   docker build -t weightwire:0.1.0 .                    # GPUs, and UCX 1.22 from its source, with verbs and CUDA
# By digest, as docker-library/repo-info lists this tag. Packages are Debian's newest at the time of the build: the bill of materials has their versions.
ARG BASE=debian:bookworm-20260918-slim@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251
# CUDA's compiler, headers, libcudart and the stubs of the driver's libraries. The driver's libraries come with the host, NCCL with
# the application that uses it. A tag: its digest could not be looked up where this was written. For a build that must not change:
# --build-arg CUDA=…@sha256:….
ARG CUDA=docker.io/nvidia/cuda:13.0.1-devel-ubuntu22.04
ARG UCX_VERSION=1.22.0
ARG WEIGHTWIRE_VERSION=0.1.0

FROM ${BASE} AS build
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      g++ cmake ninja-build pkg-config mold ccache \
      libgrpc++-dev protobuf-compiler-grpc libprotobuf-dev protobuf-compiler libboost1.81-dev prometheus-cpp-dev \
      libexpected-dev libspdlog-dev libfmt-dev libcli11-dev nlohmann-json3-dev libxxhash-dev libzstd-dev libyaml-cpp-dev \
      libsqlite3-dev libssl-dev libucx-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
ARG JOBS=
# What `git describe --always --dirty --abbrev=12` says: there is no repository in here to ask. In `weightwired --version`, metrics and labels.
ARG WEIGHTWIRE_REVISION=
# Another folder than the builder's own cache: one that is mounted from outside. To ccache LANG is part of a command.
ARG CCACHE_DIR=/root/.cache/ccache
ENV CCACHE_BASEDIR=/src CCACHE_NOHASHDIR=1 LANG=C.UTF-8
RUN --mount=type=cache,target=/root/.cache/ccache \
    cmake --preset release -DWEIGHTWIRE_TESTS=OFF -DWEIGHTWIRE_BENCH=OFF \
    && cmake --build build/release -j "${JOBS:-$(nproc)}" --target weightwired wwctl weightwire_ucx \
    && mkdir /out \
    && cp build/release/bin/weightwired build/release/bin/wwctl build/release/bin/libweightwire_checkpoint.so "$(find build/release -name libweightwire_ucx.so)" /out \
    && strip /out/*
# The Python package, with Debian's own gRPC and NumPy, and its stubs; the demo beside them.
RUN mkdir /package && cp -r client/python/weightwire /package/ && mkdir /package/weightwire/_demo && cp -r client/python/demo /package/weightwire/_demo/ \
    && protoc -I proto --python_out=/package --grpc_out=/package --plugin=protoc-gen-grpc="$(command -v grpc_python_plugin)" \
         proto/weightwire/v1/*.proto \
    && touch /package/weightwire/v1/__init__.py
# What is compiled into the binaries: libraries of headers only. The others are packages of the image.
RUN mkdir /sbom && cp deploy/sbom.sh /sbom && dpkg-query -W -f 'compiled-in ${Package} ${Version} ${Architecture}\n' \
      libboost1.81-dev libexpected-dev libcli11-dev nlohmann-json3-dev > /sbom/compiled-in

FROM ${BASE} AS common
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      libgrpc++1.51 libprometheus-cpp-core1.0 libspdlog1.10 libsqlite3-0 libssl3 libxxhash0 libyaml-cpp0.7 \
      libibverbs1 librdmacm1 ibverbs-providers libzstd1 \
      python3 python3-grpcio python3-protobuf python3-numpy \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir -p /run/weightwire /var/lib/weightwire /usr/share/weightwire \
    && chown 10001:10001 /run/weightwire /var/lib/weightwire
COPY --from=build /out /usr/local/bin
COPY --from=build /package /usr/lib/python3/dist-packages
COPY deploy/entrypoint.sh /usr/local/bin/weightwire-entrypoint
COPY LICENSE /usr/share/doc/weightwire/
ARG WEIGHTWIRE_VERSION
LABEL org.opencontainers.image.title="weightwire" \
      org.opencontainers.image.description="Moves weights from an RL trainer fleet to a rollout fleet" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$WEIGHTWIRE_VERSION"
# Where the source is (a URL), and of what revision; empty where the build was not told.
ARG WEIGHTWIRE_SOURCE=
ARG WEIGHTWIRE_REVISION=
LABEL org.opencontainers.image.source="$WEIGHTWIRE_SOURCE" \
      org.opencontainers.image.revision="$WEIGHTWIRE_REVISION"
ENV WEIGHTWIRE_BIN_DIR=/usr/local/bin PYTHONDONTWRITEBYTECODE=1
# On whatever port and with TLS or not. Kubernetes has probes of its own.
HEALTHCHECK --interval=10s --timeout=12s --start-period=60s CMD ["python3", "-m", "weightwire.health"]
ENTRYPOINT ["weightwire-entrypoint"]

FROM common AS cpu
ARG WEIGHTWIRE_VERSION
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends libucx0 \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,from=build,source=/sbom,target=/sbom \
    sh /sbom/sbom.sh "$WEIGHTWIRE_VERSION" /sbom/compiled-in > /usr/share/weightwire/sbom.spdx.json
LABEL dev.weightwire.ucx="Debian"
USER 10001:10001

FROM ${CUDA} AS cuda

# Kernels and GPU memory (libweightwire_cuda, with the CUDA runtime inside) and NCCL communicators (libweightwire_nccl, which loads
# the application's NCCL). Untested on hardware.
FROM build AS build-gpu
COPY --from=cuda /usr/local/cuda/bin /usr/local/cuda/bin
COPY --from=cuda /usr/local/cuda/nvvm /usr/local/cuda/nvvm
COPY --from=cuda /usr/local/cuda/include /usr/local/cuda/include
COPY --from=cuda /usr/local/cuda/lib64/libcudart.so* /usr/local/cuda/lib64/libcudart_static.a /usr/local/cuda/lib64/libcudadevrt.a \
     /usr/local/cuda/lib64/
# nvcc looks for headers and libraries below the folder of its target.
RUN mkdir -p /usr/local/cuda/targets/x86_64-linux && ln -s ../../include /usr/local/cuda/targets/x86_64-linux/include \
    && ln -s ../../lib64 /usr/local/cuda/targets/x86_64-linux/lib
RUN --mount=type=cache,target=/root/.cache/ccache \
    cmake --preset release -DWEIGHTWIRE_TESTS=OFF -DWEIGHTWIRE_BENCH=OFF -DCMAKE_CUDA_COMPILER=/usr/local/cuda/bin/nvcc \
    && cmake --build build/release -j "${JOBS:-$(nproc)}" --target weightwire_cuda weightwire_nccl \
    && mkdir /out-gpu \
    && cp build/release/lib/libweightwire_cuda.so "$(find build/release -name libweightwire_nccl.so)" /out-gpu \
    && strip --strip-unneeded /out-gpu/*
RUN echo "source cuda-cudart $(sed -n 's/^#define CUDART_VERSION *//p' /usr/local/cuda/include/cuda_runtime_api.h) NOASSERTION -" > /sbom/cuda

FROM common AS gpu
COPY --from=build-gpu /out-gpu /usr/local/bin

# UCX, for the production image. configure ends where something that is asked for by name is not there.
FROM ${BASE} AS ucx
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      g++ make curl ca-certificates libibverbs-dev librdmacm-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=cuda /usr/local/cuda/include /usr/local/cuda/include
COPY --from=cuda /usr/local/cuda/lib64/libcudart.so* /usr/local/cuda/lib64/
COPY --from=cuda /usr/local/cuda/lib64/stubs /usr/local/cuda/lib64/stubs
ARG UCX_VERSION
ARG UCX_URL=https://github.com/openucx/ucx/releases/download/v${UCX_VERSION}/ucx-${UCX_VERSION}.tar.gz
ARG UCX_SHA256=258941cddd14ca60d38c0d31b9b09ec1052c901086841011a498da8b55a3cb24
ARG JOBS=
WORKDIR /ucx
RUN curl -fsSL -o ucx.tar.gz "$UCX_URL" \
    && echo "$UCX_SHA256  ucx.tar.gz" | sha256sum -c - \
    && tar xzf ucx.tar.gz --strip-components=1 \
    && ./contrib/configure-release-mt --prefix=/opt/ucx --disable-static --enable-cma --with-verbs --with-mlx5 --with-rdmacm \
         --with-cuda=/usr/local/cuda --without-gdrcopy --without-java --without-go \
    && for part in ucm ucs uct ucp tools/info; do make -C src/$part -j "${JOBS:-$(nproc)}" install || exit; done \
    && cp LICENSE /opt/ucx/ \
    && cp -a /usr/local/cuda/lib64/libcudart.so.* /opt/ucx/lib/ \
    && rm -rf /opt/ucx/include /opt/ucx/share /opt/ucx/etc /opt/ucx/lib/cmake /opt/ucx/lib/pkgconfig \
    && find /opt/ucx -name '*.la' -delete \
    && find /opt/ucx -name '*.so*' -type f -exec strip --strip-unneeded {} +
RUN echo "source ucx $UCX_VERSION $UCX_URL $UCX_SHA256" > /opt/ucx/sources

FROM gpu AS production
ARG UCX_VERSION
ARG WEIGHTWIRE_VERSION
COPY --from=ucx /opt/ucx /opt/ucx
RUN --mount=type=bind,from=build-gpu,source=/sbom,target=/sbom \
    echo /opt/ucx/lib > /etc/ld.so.conf.d/ucx.conf && ldconfig \
    && sh /sbom/sbom.sh "$WEIGHTWIRE_VERSION" /sbom/compiled-in /sbom/cuda /opt/ucx/sources > /usr/share/weightwire/sbom.spdx.json
LABEL dev.weightwire.ucx="$UCX_VERSION"
USER 10001:10001
