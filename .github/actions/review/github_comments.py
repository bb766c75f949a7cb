"""The comments of a pull request on GitHub: whatever the API answers, and wherever it leads."""

from __future__ import annotations

import json
import os
import urllib.request


def own_comment(path: str, marker: str, token: str) -> int | None:
    """Return the id of the comment that an earlier run wrote."""
    for page in range(1, 31):
        found = json.loads(ask("GET", f"{path}?per_page=100&page={page}", token))
        if not isinstance(found, list):
            said = f"the API answered with no list of comments: {str(found)[:80]}"
            raise ValueError(said)  # noqa: TRY004 # nothing of ours is of the wrong type
        for one in filter(_is_comment, found):
            # Anyone may write the marker, and a token may change what others wrote.
            if one["user"].get("type") == "Bot" and one["body"].startswith(marker):
                return int(one["id"])
        if len(found) < 100:  # noqa: PLR2004 # as many as were asked for
            break
    return None


def _is_comment(one: object) -> bool:
    """Tell whether something has what is asked of a comment; who is gone leaves no `user`."""
    wanted = {"id": int, "body": str, "user": dict}
    return isinstance(one, dict) and all(
        isinstance(one.get(key), kind) for key, kind in wanted.items()
    )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The token is for the API that was named: where that leads elsewhere, nothing goes along."""

    def redirect_request(self, *_: object) -> None:
        """Return no request: the answer is an error then."""


def ask(method: str, path: str, token: str, body: dict[str, str] | None = None) -> bytes:
    """Call GitHub and return its answer, which is whole."""
    url = os.environ.get("GITHUB_API_URL", "https://api.github.com") + path
    data = json.dumps(body).encode() if body is not None else None
    headers = {
        "Accept": "application/vnd.github+json",
        "Authorization": f"Bearer {token}",
        "Content-Type": "application/json",
        "User-Agent": "gradsurgeon-review",
    }
    request = urllib.request.Request(url, data, headers, method=method)
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=30) as answer:
        raw: bytes = answer.read()
        return raw
