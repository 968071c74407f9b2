# One image for the driver, the Ray head and the Ray workers: they must have the same Python and Ray.
#   docker build -t worldline .
#   docker run --rm --shm-size=4g -v "$PWD/runs:/app/runs" worldline run jobs/stdlib-gpt.yaml
# The default package index gives torch with CUDA. For a smaller CPU image give the index of torch's CPU builds:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=... -t worldline .
FROM python:3.11-slim

ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

WORKDIR /app
# Dependencies first: they change less often than the code.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir -p platform/worldline && touch platform/worldline/__init__.py \
    && pip install -c constraints.txt torch \
    && pip install -c constraints.txt .
COPY platform platform
RUN pip install --no-deps --force-reinstall .
COPY jobs jobs

RUN useradd --create-home worldline && mkdir -p runs data && chown worldline runs data
USER worldline
RUN python jobs/stdlib_text.py data/stdlib

ENTRYPOINT ["worldline"]
CMD ["--help"]
