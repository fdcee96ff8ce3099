"""`/health` and `/metrics` of a client, when `enable_client_http_server` asks for them."""

import http.server
import json
import threading

from tidepool import _native


class HttpServer:
    """Serves on one address until it is closed. OSError when the port is taken."""

    def __init__(self, host: str, port: int, client: _native.Client) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 5

            def do_GET(self) -> None:
                status, kind, body = _answer(self.path, client)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self._server = http.server.HTTPServer((host, port), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="mooncake-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _answer(path: str, client: _native.Client) -> tuple[int, str, bytes]:
    path = path.partition("?")[0]
    if path == "/health":
        leader = client.leader()
        status = {"status": "healthy" if leader else "no leader known", "leader": leader}
        return (200 if leader else 503), "application/json", json.dumps(status).encode()
    if path in ("/metrics", "/metrics/summary"):
        lines = [f"tidepool_client_{name} {value}" for name, value in sorted(client.metrics().items())]
        return 200, "text/plain; version=0.0.4", ("\n".join(lines) + "\n").encode()
    return 404, "text/plain", b"GET /health, /metrics or /metrics/summary\n"
