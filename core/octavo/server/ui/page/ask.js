// One question to the server, whose answer streams.

// An address of the server, behind whatever prefix this page was found; a password in its own address stays out of it.
export const at = (path) => location.origin + location.pathname.replace(/ui$/, path);

// Yields the pieces of text; in the end `told`, where given, has what the answer cost. Throws what the server says.
export async function* ask(body, canChat, signal, told = {}) {
  const started = performance.now();
  const response = await fetch(at(canChat ? "v1/chat/completions" : "v1/completions"), {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...(canChat ? body : asText(body)), stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await problem(response);
  for await (const chunk of events(response.body)) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) told.usage = chunk.usage;
    const [choice] = chunk.choices;
    const text = choice?.delta?.content ?? choice?.text ?? "";
    if (choice) {
      told.last = performance.now();
      told.first ??= told.last;
      told.wait ??= told.first - started;
    }
    if (text) yield text;
  }
}

async function problem(response) {
  const told = await response.json().catch(() => null);
  const error = new Error(told?.error?.message ?? `the server answers ${response.status}`);
  error.status = response.status;
  return error;
}

// A model without a chat template goes on with a text.
function asText({ messages, ...rest }) {
  return { ...rest, prompt: messages.map((message) => message.content).join("\n") };
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader(); // not every browser iterates over a stream
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have failed: whoever reads is told so already
  }
}
