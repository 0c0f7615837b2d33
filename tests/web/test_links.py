"""No link of the built book leads to a page or an anchor that is not there. Needs no browser."""

from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit


class Links(HTMLParser):
    """The anchors of a page, and what it links to."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        for name in ("href", "src"):
            if values.get(name):
                self.links.append(values[name])


def test_links(site):
    pages = {}
    for path in site.rglob("*.html"):
        if "_static" not in path.parts:
            pages[path.resolve()] = Links(path.read_text(encoding="utf-8"))
    dead = []
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            missing = not there.exists()
            if missing or (anchor and there in pages and anchor not in pages[there].anchors):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert not dead, "\n".join(dead)
