# sporeloom for CPUs: training, serving, plans and certificates on a machine without accelerators.
#   docker build --tag sporeloom .
#   docker run --rm --volume "$PWD:/work" sporeloom train --data corpus.txt --steps 20
FROM python:3.11-slim

# A compiler for the kernels of decoding, which are built at their first use.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libgomp1 && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY sporeloom sporeloom
COPY pangu pangu
COPY codegeex codegeex
COPY palm palm
COPY parallel_configs parallel_configs
RUN pip install --no-cache-dir --constraint constraints.txt ".[serve]"

# Nothing runs as root; what is written belongs into the folder that is mounted.
RUN useradd --create-home user
USER user
WORKDIR /work
EXPOSE 8000
ENTRYPOINT ["sporeloom"]
CMD ["--help"]
