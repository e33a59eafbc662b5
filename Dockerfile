# The planning service. Build: docker build -t stagewright .   Run: docs/serving.md
FROM python:3.13-slim AS build
WORKDIR /source
# The environment is at the same place in both stages, so that its scripts work in the second.
RUN python -m venv /opt/stagewright
ENV PATH=/opt/stagewright/bin:$PATH
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt setuptools
COPY . .
RUN pip install --no-cache-dir -c constraints.txt --no-build-isolation ".[service,postgresql]"

FROM python:3.13-slim
COPY --from=build /opt/stagewright /opt/stagewright
RUN useradd --uid 10001 --no-create-home stagewright \
    && install -d -o stagewright /var/lib/stagewright /var/cache/stagewright
ENV PATH=/opt/stagewright/bin:$PATH \
    NUMBA_CACHE_DIR=/var/cache/stagewright \
    STAGEWRIGHT_STORE=/var/lib/stagewright/jobs.sqlite
USER 10001
WORKDIR /var/lib/stagewright
# A first plan compiles kernels, which takes a minute that users of the service should not wait.
RUN cd "$(mktemp -d)" \
    && stagewright model gpt --layers 4 --device a100 -o model.json \
    && stagewright cluster 2x2 --device a100 -o cluster.json \
    && stagewright plan --model model.json --cluster cluster.json --microbatches 8 -o plan.json
VOLUME /var/lib/stagewright
EXPOSE 8754
HEALTHCHECK --start-period=20s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8754/health/ready', timeout=5)"]
# Off loopback it starts only when there is a token: stagewright token USER.
CMD ["stagewright", "serve", "--host", "0.0.0.0"]
