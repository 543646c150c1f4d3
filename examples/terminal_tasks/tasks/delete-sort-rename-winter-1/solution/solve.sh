#!/bin/bash
set -e
rm winter.txt
sort -o ticket.txt ticket.txt
mv silver.txt bottle.txt
