# Slipstream's server in a container, for CPUs or NVIDIA GPUs.
#
#   docker build -t slipstream --build-arg PIP_ARGS="--extra-index-url ..." .   # CPU: the index of torch's CPU builds
#   docker build -t slipstream:gpu .                                            # GPU: torch brings its CUDA libraries
#   docker run --rm -p 8000:8000 -v slipstream-cache:/cache slipstream
#   docker run --rm -p 8000:8000 -v slipstream-cache:/cache --gpus all slipstream:gpu
FROM python:3.12-slim

# The C kernels of CPUs, and Triton's launchers on GPUs, are compiled on the machine that runs them.
RUN apt-get update \
    && apt-get install --no-install-recommends -y gcc g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*

ARG PIP_ARGS=""
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY slipstream ./slipstream
RUN pip install --no-cache-dir ${PIP_ARGS} ".[server,structured]"

# Models, compiled kernels and measurements outlive the container in a volume.
ENV SLIPSTREAM_CACHE=/cache/slipstream HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton
RUN useradd --create-home slipstream && mkdir /cache && chown slipstream /cache
USER slipstream
WORKDIR /home/slipstream
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=300s --interval=15s CMD python -c \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"
ENTRYPOINT ["slipstream"]
CMD ["serve", "smollm2-135m", "--host", "0.0.0.0", "--port", "8000"]
