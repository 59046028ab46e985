"""A receiver of OpenTelemetry traces over HTTP: spans as a collector would get them from tritonserver, which sends JSON."""

import http.server
import json
import threading
from collections import namedtuple

# Times in nanoseconds since 1970; ids in hexadecimal, the parent's empty where there is none.
Span = namedtuple("Span", "trace_id span_id parent_id name start end events")


def spans(body):
    """The spans of an export, whatever resource and scope they are of."""
    for resource in json.loads(body)["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for one in scope["spans"]:
                yield Span(
                    one["traceId"], one["spanId"], one.get("parentSpanId", ""), one["name"],
                    int(one["startTimeUnixNano"]), int(one["endTimeUnixNano"]),
                    [event["name"] for event in one.get("events", [])],
                )


class Receiver:
    """Listens as long as it is entered; `spans` is what has come."""

    def __init__(self):
        self.spans = []
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                receiver.spans += spans(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
