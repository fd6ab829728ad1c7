# Images of trtpipe that run as a user without rights.
#
#   docker build --target bench -t trtpipe-bench .     plan, check and bench
#   docker build --target serve -t trtpipe-serve .     tritonserver and the reference runtime as well
#   docker run --rm --network host -v "$PWD:/data" -u "$(id -u)" trtpipe-bench trtpipe plan --model llama3-8b
#
# The store and the downloads are in /data too: what is in ./runs links into the store, and a user of another number has
# no folder of its own.
#
# BASE is a Debian or Ubuntu with Python 3.11, its shared library, and glibc 2.35 or newer.
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS runtime
# Ubuntu's and Triton's images have a user of this number.
RUN useradd --non-unique --uid 1000 --create-home trtpipe && mkdir /data && chown 1000 /data
ENV PATH=/opt/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 TRTPIPE_HOME=/data/.trtpipe HF_HOME=/data/.trtpipe/huggingface
WORKDIR /data
# By number, so that Kubernetes sees that it is not root.
USER 1000:1000
# No entry point: a pod of `trtpipe deploy k8s` names the whole command.
CMD ["trtpipe"]

FROM ${BASE} AS builder
WORKDIR /src
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update && apt-get install -y --no-install-recommends binutils \
 && python3 -m venv /tools && python3 -m venv --without-pip /opt/venv
COPY . .
# Left out: tests, types, and the debug symbols of two packages, together 25 MB.
RUN /tools/bin/pip --python /opt/venv/bin/python install --no-compile '.[traces]' \
 && cd /opt/venv/lib/python3*/site-packages \
 && find . -name tests -type d -prune -exec rm -r {} + && find . -name '*.pyi' -delete \
 && strip rapidjson.*.so uvloop/*.so
# Compiles the modules that the commands load, and only those.
RUN cd / && /opt/venv/bin/trtpipe plan --model llama3-8b --gpu h100 \
 && /opt/venv/bin/trtpipe bench selftest --protocol grpc,http --streams 4

FROM runtime AS bench
COPY --from=builder /opt/venv /opt/venv

FROM builder AS serve-builder
# PyPI's torch brings CUDA, 5 GB: here is torch for a CPU. XGrammar brings Triton's compiler, 1 GB, which needs a GPU.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN /tools/bin/pip --python /opt/venv/bin/python install --no-compile --extra-index-url "${TORCH_INDEX}" '.[serve,traces]' \
 && rm -r /opt/venv/lib/python3*/site-packages/triton

FROM runtime AS serve
COPY --from=serve-builder /opt/venv /opt/venv
EXPOSE 8000 8001 8002 9000
