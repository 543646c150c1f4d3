#!/bin/bash
# A third for each thing that is done, and 1 only if all files are as they must be.
points=0
{ sort -c ticket.txt; } 2>/dev/null && points=$((points + 1))
{ [ -e garden.txt ] && [ ! -e needle.txt ]; } 2>/dev/null && points=$((points + 1))
{ [ -e string.txt ] && [ -e horse.txt ]; } 2>/dev/null && points=$((points + 1))
reward=0.$((points * 33)) solved=0
if diff -r /app /tests/expected >/dev/null; then
  reward=1 solved=1
elif [ $points = 3 ]; then
  reward=0.66
fi
echo "{\"reward\": $reward, \"solved\": $solved}" > /logs/verifier/reward.json
echo "$points of 3 things are done"
