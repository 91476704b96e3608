# Built in two stages: the first has a compiler, the image that runs has not.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# Where to find torch without CUDA, for an index whose own build of it brings several GB of libraries.
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
COPY constraints.txt ./
RUN python3 -m venv /opt/faser && /opt/faser/bin/pip install -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY faser faser
RUN /opt/faser/bin/pip install -c constraints.txt .
WORKDIR /
RUN /opt/faser/bin/python -m faser.kernels.cpu.build --prebuild && chmod -R a+rX /opt/faser
# PRELOAD=0 leaves the default model out; it is then fetched at the first start. It lies outside of /data, where a
# volume would hide it.
ARG PRELOAD=1
RUN mkdir -p /data && if [ "${PRELOAD}" = 1 ]; then FASER_CACHE_DIR=/opt/faser/share/faser /opt/faser/bin/faser pull; fi

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="FASER" \
      org.opencontainers.image.description="An OpenAI-compatible LLM serving engine" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/faser /opt/faser
COPY --from=build --chown=10001:10001 /data /data
ENV HOME=/data FASER_CACHE_DIR=/data FASER_HOST=0.0.0.0 FASER_PORT=8000 PYTHONUNBUFFERED=1
USER 10001:10001
VOLUME /data
EXPOSE 8000
# Drains: answers that run may take the 25 s of --shutdown-timeout, so stop the container with a grace period of 30 s.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["/opt/faser/bin/python", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ['FASER_PORT']}/health\", timeout=4)"]
ENTRYPOINT ["/opt/faser/bin/faser", "serve"]
