# SPDX-License-Identifier: Apache-2.0
"""Ask a server with the client of OpenAI: `python examples/ask_server.py http://127.0.0.1:8000/v1`."""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="none")
model = client.models.list().data[0].id
for part in client.completions.create(model=model, prompt="小镇的早晨", max_tokens=16, seed=1, stream=True):
    print(part.choices[0].text, end="", flush=True)
print()
