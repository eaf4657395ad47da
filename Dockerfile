# forerun in a container.
#
#   docker build -t forerun .                          on a CPU, with the embedded model inside
#   docker build -t forerun --build-arg TORCH=cu128 .  on a CUDA device
#   docker build -t forerun --build-arg MODEL=none .   without a model: mount one
#   docker build -t forerun --build-arg EXTRAS=ray .   with an extra of pyproject.toml
#
# TORCH names the build of torch, as its wheel index does. The image's entry point is the `forerun` command.

ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG TORCH=cpu
ARG MODEL=embedded
ARG EXTRAS=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /src
RUN python -m venv /opt/forerun
ENV PATH=/opt/forerun/bin:$PATH
# The requirements first: they change less often than the source, and take longest.
COPY requirements/serve.txt requirements/extras.txt requirements/
RUN pip install --extra-index-url "https://download.pytorch.org/whl/${TORCH}" -r requirements/serve.txt
COPY pyproject.toml README.md LICENSE ./
# What the service shows at /docs: links in service/documents lead here.
COPY docs/api.md docs/clients.md docs/experiments.md docs/operations.md docs/
COPY cache_store cache_store
COPY draft draft
COPY service service
COPY speculation speculation
COPY target target
RUN pip install --no-deps . \
    && if [ -n "$EXTRAS" ]; then \
        pip install --constraint requirements/serve.txt --constraint requirements/extras.txt ".[$EXTRAS]"; \
    fi
ENV FORERUN_CACHE_DIR=/var/lib/forerun
RUN mkdir -p "$FORERUN_CACHE_DIR" && if [ "$MODEL" = embedded ]; then forerun fetch; fi

FROM python:${PYTHON}-slim
ARG TORCH=cpu
# Triton compiles the launchers of its kernels when a CUDA device is first used. Debian's mirrors keep only the latest
# version of a package, so that a pinned one would fail later.
# hadolint ignore=DL3008
RUN if [ "$TORCH" != cpu ]; then \
        apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
RUN useradd --uid 10001 --create-home forerun
COPY --from=build /opt/forerun /opt/forerun
COPY --from=build --chown=forerun:forerun /var/lib/forerun /var/lib/forerun
ENV PATH=/opt/forerun/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    FORERUN_CACHE_DIR=/var/lib/forerun \
    FORERUN_HOST=0.0.0.0
# A number, so that Kubernetes can check runAsNonRoot.
USER 10001
WORKDIR /home/forerun
# Converted models and compiled steps. A named volume that is mounted here for the first time gets what is inside.
VOLUME /var/lib/forerun
EXPOSE 8000 9000
# Of `serve` on its port without TLS. `engine` speaks no HTTP: run it with --no-healthcheck or a check of your own. A first
# start converts and compiles.
HEALTHCHECK --interval=10s --timeout=5s --retries=3 --start-period=10m \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ.get('FORERUN_PORT', '8000') + '/health/ready', timeout=4)"]
ENTRYPOINT ["forerun"]
CMD ["serve"]
