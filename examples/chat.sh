curl http://127.0.0.1:8080/v1/chat/completions -H "Content-Type: application/json" -d '{
  "model": "recall",
  "messages": [
    {"role": "user", "content": "The code of the amber falcon is 4821."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "What is the code of the amber falcon?"}
  ]
}'
