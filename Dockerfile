# kvferry without llama-servers, for docker-compose.yml.
FROM python:3.13-slim AS build
COPY pyproject.toml README.md LICENSE /src/
COPY router /src/router
# Install into a virtual environment: the next stage copies nothing else from here.
RUN python -m venv --without-pip /opt/kvferry \
    && python -m pip --python /opt/kvferry/bin/python install \
        --no-cache-dir --only-binary :all: '/src[cold,fleet]'

FROM python:3.13-slim
# docker-compose.yml runs the llama-servers under the same number: kvferry and the servers read,
# rename and remove each other's files.
RUN useradd --system --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin kvferry \
    && install -d -o kvferry -g kvferry -m 0700 /kv
COPY --from=build /opt/kvferry /opt/kvferry
COPY config/docker.yaml /etc/kvferry/kvferry.yaml
ENV PATH=/opt/kvferry/bin:$PATH PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 8080
STOPSIGNAL SIGTERM
# Healthy once a backend is usable.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/kvferry/health', timeout=4)"]
ENTRYPOINT ["kvferry"]
CMD ["serve", "--config", "/etc/kvferry/kvferry.yaml"]
