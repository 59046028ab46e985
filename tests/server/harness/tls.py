"""A door with TLS in front of a port without: what load balancers and ingresses put before a server."""

import asyncio
import contextlib
import ssl
import subprocess
import threading

# The server's names in its certificate.
NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


class Authority:
    """A certificate authority with one server's certificate, made in a folder by openssl."""

    def __init__(self, folder):
        self.folder, self.root = folder, folder / "root.pem"
        self.certificate, self.key = folder / "server.pem", folder / "server.key"
        request, names = folder / "server.csr", folder / "names"
        names.write_text(NAMES)
        new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        self.openssl("req", "-x509", *new_key, "-keyout", folder / "root.key", "-out", self.root, "-subj", "/CN=root")
        self.openssl("req", *new_key, "-keyout", self.key, "-out", request, "-subj", "/CN=localhost")
        self.openssl("x509", "-req", "-in", request, "-CA", self.root, "-CAkey", folder / "root.key", "-CAcreateserial",
                     "-extfile", names, "-out", self.certificate)

    def openssl(self, *arguments):
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


async def pump(reader, writer):
    """Hands on what comes until it ends."""
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.contextmanager
def door(authority, to, protocols):
    """`HOST:PORT` that speaks TLS and hands everything on to `to`; `protocols` are what it offers, `h2` for gRPC."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.certificate, authority.key)
    context.set_alpn_protocols(protocols)
    host, port = to.rsplit(":", 1)

    async def visitor(reader, writer):
        inside_reader, inside_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, inside_writer), pump(inside_reader, writer))

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(visitor, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"localhost:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.close()
