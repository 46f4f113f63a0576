# Everything that needs no GPU: MLflow's server, the dashboard, Ray's head, CPU workers, sweeps. From the root of the repository:
#   docker build --file docker/cpu.Dockerfile --tag ablate-cpu:0.1.0 .
# The package index gives torch with CUDA's libraries, gigabytes that nothing here uses: --build-arg TORCH_INDEX=<address>, of PyTorch's
# own index of CPU wheels, leaves them out.
FROM python:3.12.14-slim-trixie@sha256:2f17fc044b579bab302c2e8054d3a686e2cb9a83de48e70534b94cd8ebbe06a9

ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
WORKDIR /opt/ablate

# What the package stands on first: it changes less often than the package.
ARG TORCH_INDEX=""
COPY pyproject.toml constraints.txt ./
COPY docker/pins.py docker/pins.py
RUN python docker/pins.py requirements server hf > /tmp/requirements.txt \
    && pip install ${TORCH_INDEX:+--extra-index-url $TORCH_INDEX} --constraint constraints.txt --requirement /tmp/requirements.txt

# Editable, beside analysis/ and experiments/. The build compiles the quantisers, or this ends here.
COPY . .
RUN pip install --constraint constraints.txt --no-deps --editable . \
    && python docker/pins.py complete

# The same number in both images, since they share the state folder.
RUN useradd --uid 10001 --create-home ablate && mkdir /state /artifacts /work && chown ablate /state /artifacts /work
USER ablate
WORKDIR /work
ENV ABLATE_STATE=/state RAY_USAGE_STATS_ENABLED=0 MLFLOW_DISABLE_TELEMETRY=true PYTHONUNBUFFERED=1
VOLUME /state
HEALTHCHECK --interval=60s --timeout=30s CMD ["ablate", "--version"]
ENTRYPOINT ["ablate"]
CMD ["--help"]
