"""A real HTTP server on this machine that speaks two chat protocols, and fails in every way when it is told to."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "sk-test-4711-secret"


class Reply:
    """status, JSON body (or bytes as they are), headers, and seconds before it is sent; drop: hang up instead."""

    def __init__(self, body=None, status=200, headers=None, delay=0.0, drop=False):
        self.body, self.status, self.headers = body, status, headers or {}
        self.delay, self.drop = delay, drop


def chat(*texts, reason="stop"):
    return Reply(
        {"choices": [{"message": {"role": "assistant", "content": t}, "finish_reason": reason} for t in texts]}
    )


def message(*texts, reason="end_turn"):
    return Reply({"type": "message", "content": [{"type": "text", "text": t} for t in texts], "stop_reason": reason})


def error(status, text="no", **headers):
    return Reply(
        {"error": {"message": text, "code": text}}, status, {k.replace("_", "-"): v for k, v in headers.items()}
    )


class ApiServer(ThreadingHTTPServer):
    """`reply(number of the request, its body) -> Reply`. `seen`: (path, headers, body) of each request."""

    daemon_threads = True

    def __init__(self, reply):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.seen, self.times = reply, [], []
        self.busy = self.most_busy = 0
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    @property
    def bodies(self):
        return [body for _, _, body in self.seen]

    def handle_error(self, request, client_address):
        """A client that hung up is part of the tests."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with server.lock:
            number = len(server.seen)
            server.seen.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            server.times.append(time.monotonic())
            server.busy += 1
            server.most_busy = max(server.most_busy, server.busy)
        reply = server.reply(number, body)
        time.sleep(reply.delay)
        with server.lock:
            server.busy -= 1
        if reply.drop:
            self.close_connection = True
            self.connection.close()
            return
        data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        for name, value in {"content-type": "application/json", **reply.headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        """Nothing on the console."""
