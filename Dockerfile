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
COPY requirements/serve.txt requirements/serve.txt
RUN pip install --extra-index-url "https://download.pytorch.org/whl/${TORCH}" -r requirements/serve.txt
COPY pyproject.toml README.md LICENSE ./
COPY cache_store cache_store
COPY draft draft
COPY service service
COPY speculation speculation
COPY target target
RUN pip install --no-deps . && if [ -n "$EXTRAS" ]; then pip install ".[$EXTRAS]"; fi
ENV FORERUN_CACHE_DIR=/var/lib/forerun
RUN mkdir -p "$FORERUN_CACHE_DIR" && if [ "$MODEL" = embedded ]; then forerun fetch; fi

FROM python:${PYTHON}-slim
ARG TORCH=cpu
# Triton compiles the launchers of its kernels when a CUDA device is first used.
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
USER forerun
WORKDIR /home/forerun
# Converted models and compiled steps. A named volume that is mounted here for the first time gets what is inside.
VOLUME /var/lib/forerun
EXPOSE 8000 9000
ENTRYPOINT ["forerun"]
CMD ["serve"]
