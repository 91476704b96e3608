# Three stages: the Python packages, FASER with its compiled kernels and its model, and the image that runs, which has no
# compiler. The image for NVIDIA GPUs is made from the same file by build arguments: deploy/README.md.
ARG BASE_IMAGE=python:3.11-slim
# Has the same Python at the same path as BASE_IMAGE; for a GPU it has nvcc too.
ARG BUILD_IMAGE=${BASE_IMAGE}

FROM ${BUILD_IMAGE} AS packages
ARG BUILD_PACKAGES
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ ${BUILD_PACKAGES} \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1
# Where to find torch without CUDA, for an index whose own build of it brings several GB of libraries.
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
COPY constraints.txt ./
RUN python3 -m venv /opt/faser && /opt/faser/bin/pip install -c constraints.txt torch
# Extras of pyproject.toml, such as "cuda otel".
ARG EXTRAS="otel kv-events"
COPY pyproject.toml deploy/image/requirements.py ./
RUN python3 requirements.py ${EXTRAS} > requirements.txt \
    && /opt/faser/bin/pip install -c constraints.txt -r requirements.txt
COPY deploy/image/trim.sh ./
RUN sh trim.sh /opt/faser

FROM packages AS build
COPY pyproject.toml README.md LICENSE ./
COPY faser faser
ENV PYTHONDONTWRITEBYTECODE=1
RUN /opt/faser/bin/pip install --no-deps --no-build-isolation --prefix /out . \
    && cp -r /out/. /opt/faser \
    && site="$(echo /out/lib/python3*/site-packages)" \
    && /opt/faser/bin/python -m compileall -q --invalidation-mode unchecked-hash "${site}" \
    && /opt/faser/bin/python -m faser.kernels.cpu.build --prebuild "${site}/faser/kernels/cpu/native/prebuilt"
# Architectures that FlashInfer's modules are compiled for, such as "8.0 9.0a"; needs nvcc, and no GPU.
ARG CUDA_ARCHS
# Modules beside those of common models: docs/gpu.md lists them.
ARG CUDA_MODULES
RUN if [ -n "${CUDA_ARCHS}" ]; then site="$(echo /out/lib/python3*/site-packages)" \
        && /opt/faser/bin/faser env --build-kernels --arch "${CUDA_ARCHS}" --out "${site}/flashinfer/data/aot" \
            ${CUDA_MODULES:+--only "${CUDA_MODULES}"} \
        && /opt/faser/bin/python -m faser.kernels.cuda.triton.launcher "${site}/faser/kernels/cuda/triton/prebuilt"; fi
# PRELOAD=0 leaves the default model out; it is then fetched at the first start. It lies outside of /data, where a
# volume would hide it.
ARG PRELOAD=1
RUN mkdir -p /model && if [ "${PRELOAD}" = 1 ]; then FASER_CACHE_DIR=/model /opt/faser/bin/faser pull; fi \
    && chmod -R a+rX /out /model && find /model -exec touch --no-dereference --date=@0 {} +

FROM ${BASE_IMAGE}
ARG RUNTIME_PACKAGES
# The standard library is compiled once here: the root is read-only, and images of Python come without its bytecode.
# hadolint ignore=DL3008
RUN if [ -n "${RUNTIME_PACKAGES}" ]; then apt-get update \
        && apt-get install -y --no-install-recommends ${RUNTIME_PACKAGES} && rm -rf /var/lib/apt/lists/*; fi \
    && python3 -m compileall -q -x '/(test|tests|idlelib|lib2to3|tkinter|turtledemo|ensurepip|(site|dist)-packages)/' \
        "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
    && install -d -o 10001 -g 0 -m 775 /data
# What changes least comes first: a new version of FASER is a layer of some MB.
COPY --from=packages /opt/faser /opt/faser
COPY --from=build /model /opt/faser/share/faser
COPY --from=build /out /opt/faser
ENV HOME=/data FASER_CACHE_DIR=/data FASER_HOST=0.0.0.0 FASER_PORT=8000 PYTHONUNBUFFERED=1
# A cluster may run it as any other user of group 0, which /data belongs to.
USER 10001:10001
VOLUME /data
# Where /tmp cannot be written Python's temporary files are in the current folder.
WORKDIR /data
EXPOSE 8000
# Drains: answers that run may take the 25 s of --shutdown-timeout, so stop the container with a grace period of 30 s.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["/opt/faser/bin/python", "-ISc", "import os, ssl, urllib.request as r; e = os.environ; r.urlopen(f\"http{'s' * ('FASER_SSL_CERTFILE' in e)}://127.0.0.1:{e['FASER_PORT']}/health\", timeout=4, context=ssl._create_unverified_context())"]
ENTRYPOINT ["/opt/faser/bin/faser", "serve"]
# After all else, so that a new revision makes no new layer.
ARG VERSION=0.1.0
ARG REVISION
ARG SOURCE
LABEL org.opencontainers.image.title="FASER" \
      org.opencontainers.image.description="An OpenAI-compatible LLM serving engine" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}"
