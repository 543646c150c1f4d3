#!/bin/bash
set -e
sort -o needle.txt needle.txt
rm tower.txt
cp window.txt mirror.txt
