# `sparse-rl` on an NVIDIA GPU: docker build -f docker/gpu.Dockerfile -t sparse-rl:gpu .
#   docker run --rm --gpus all -p 127.0.0.1:8000:8000 -v models:/models sparse-rl:gpu \
#       serve Qwen/Qwen2.5-1.5B-Instruct --host 0.0.0.0 --api-key SECRET
# torch's wheels bring CUDA's libraries; Triton compiles its launchers with gcc.
FROM python:3.12-slim

ENV PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1 HF_HOME=/models TRITON_CACHE_DIR=/models/triton
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /app
RUN pip install "torch==2.13.0"
COPY pyproject.toml README.md LICENSE ./
COPY sparse_rl sparse_rl
RUN pip install ".[serve,lora,datasets]" && useradd --uid 1000 --create-home runner && mkdir /models && chown 1000 /models
USER 1000:1000
VOLUME /models
EXPOSE 8000
ENTRYPOINT ["sparse-rl"]
CMD ["--help"]
