from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="any")
messages = [
    {"role": "user", "content": "The colour of the quiet dolphin is turquoise."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "What is the colour of the quiet dolphin?"},
]
for chunk in client.chat.completions.create(model="recall", messages=messages, stream=True):
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
