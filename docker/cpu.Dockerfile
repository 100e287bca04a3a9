# `sparse-rl` on a CPU, small: docker build -f docker/cpu.Dockerfile -t sparse-rl:cpu .
#   docker run --rm -p 127.0.0.1:8000:8000 sparse-rl:cpu serve tiny-sums --host 0.0.0.0 --api-key SECRET
FROM python:3.12-slim

ENV PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1 HF_HOME=/models OMP_NUM_THREADS=1
WORKDIR /app
# torch first and alone, in its build for CPUs: the one from the default index brings gigabytes of CUDA
RUN pip install "torch==2.13.0" --index-url https://download.pytorch.org/whl/cpu
COPY pyproject.toml README.md LICENSE ./
COPY sparse_rl sparse_rl
RUN pip install ".[serve,lora]" && useradd --uid 1000 --create-home runner && mkdir /models && chown 1000 /models
USER 1000:1000
VOLUME /models
EXPOSE 8000
ENTRYPOINT ["sparse-rl"]
CMD ["--help"]
