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

# Kernels for any CPU: with those of the CPU that builds, others would compile them again.
ENV NUMBA_CPU_NAME=generic
RUN NUMBA_CACHE_DIR=/opt/stagewright/kernels stagewright doctor --compile

FROM python:3.13-slim
COPY --from=build /opt/stagewright /opt/stagewright
RUN useradd --uid 10001 --no-create-home stagewright \
    && install -d -o stagewright /var/lib/stagewright
ENV PATH=/opt/stagewright/bin:$PATH \
    NUMBA_CPU_NAME=generic \
    NUMBA_CACHE_DIR=/tmp/kernels \
    STAGEWRIGHT_STORE=/var/lib/stagewright/jobs.sqlite
USER 10001
WORKDIR /var/lib/stagewright
VOLUME /var/lib/stagewright
EXPOSE 8754
HEALTHCHECK --start-period=20s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8754/health/ready', timeout=5)"]
# Numba reads kernels only where it may write: in /tmp, while all else may be read-only.
ENTRYPOINT ["sh", "-c", "cp -r /opt/stagewright/kernels /tmp/ && exec \"$@\"", "--"]
# Off loopback it starts only when there is a token: stagewright token USER.
CMD ["stagewright", "serve", "--host", "0.0.0.0"]
