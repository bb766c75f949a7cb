"""The comments of a pull request on GitHub: whatever the API answers, and wherever it leads."""

from __future__ import annotations

import json
import os
import urllib.request


def own_comment(path: str, marker: str, token: str) -> int | None:
    """Return the id of the comment that an earlier run wrote; ``None`` if there is none."""
    for page in range(1, 31):
        comments = json.loads(ask("GET", f"{path}?per_page=100&page={page}", token))
        if not isinstance(comments, list):
            said = f"the API answered with no list of comments: {str(comments)[:80]}"
            raise ValueError(said)  # noqa: TRY004 # nothing of ours is of the wrong type
        for comment in filter(_is_comment, comments):
            # Anyone may write the marker, and a token may change what others wrote.
            if comment["user"].get("type") == "Bot" and comment["body"].startswith(marker):
                return int(comment["id"])
        if len(comments) < 100:  # noqa: PLR2004 # as many as were asked for
            break
    return None


def _is_comment(entry: object) -> bool:
    """Tell whether an entry has what is asked of a comment: one whose author is gone has no `user`."""
    wanted = {"id": int, "body": str, "user": dict}
    return isinstance(entry, dict) and all(
        isinstance(entry.get(key), kind) for key, kind in wanted.items()
    )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the token is for the API that was named and goes nowhere else."""

    def redirect_request(self, *_: object) -> None:
        """Return no request, which makes the answer an error."""


def ask(method: str, path: str, token: str, body: dict[str, str] | None = None) -> bytes:
    """Call the API of GitHub and return its whole answer."""
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
