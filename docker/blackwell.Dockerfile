# For NVIDIA's GPUs: torch, Triton and Transformer Engine as NVIDIA builds them together. From the root of the repository:
#   docker build --file docker/blackwell.Dockerfile --tag ablate-blackwell:0.1.0 .
FROM nvcr.io/nvidia/pytorch:26.09-py3@sha256:6e8ccc607fc2a51e3741667b86316a0889418ba8b78ed0ba96e8d282b648a7a6

# An environment on top of the image's: what the image brings is seen, and never written over. Without a pip of its own, for which Ubuntu
# wants another package; without the image's own constraints, some of which are older than what ablate asks for.
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=
RUN python3 -m venv --system-site-packages --without-pip /opt/venv
WORKDIR /opt/ablate

# Torch and all that was built against it stay at what the image has: `kept.txt`; everything else is at this project's pins.
# TESTS=yes adds what the tests import, some of which benchmarks/gpu_day.sh runs.
ARG TESTS=""
COPY pyproject.toml constraints.txt ./
COPY docker/pins.py docker/pins.py
RUN python docker/pins.py kept > /opt/kept.txt \
    && python docker/pins.py merged /opt/kept.txt > /opt/constraints.txt \
    && python docker/pins.py requirements server hf > /tmp/requirements.txt \
    && if [ -n "$TESTS" ]; then python docker/pins.py tests >> /tmp/requirements.txt; fi \
    && python -m pip install --constraint /opt/constraints.txt --requirement /tmp/requirements.txt \
    && python docker/pins.py unchanged /opt/kept.txt

# An image whose Transformer Engine is older than the engine takes gets the project's, compiled against the image's torch: half an hour.
# TRANSFORMER_ENGINE=kept leaves it as it is: everything is emulated then, and `ablate plan` says why.
ARG TRANSFORMER_ENGINE=new-enough
RUN if [ "$TRANSFORMER_ENGINE" != kept ] && ! python docker/pins.py transformer-engine; then \
        NVTE_FRAMEWORK=pytorch python -m pip install --no-build-isolation --no-deps $(python docker/pins.py transformer-engine-packages); \
    fi

# Editable, beside analysis/ and experiments/. The build compiles the quantisers, or this ends here.
COPY . .
RUN python -m pip install --constraint /opt/constraints.txt --no-deps --editable . \
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
