#!/bin/bash
set -e
sort -o ticket.txt ticket.txt
mv needle.txt garden.txt
cp horse.txt string.txt
