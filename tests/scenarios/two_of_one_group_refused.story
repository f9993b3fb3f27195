Two nodes of one sharding group are killed, nothing is in storage: a silent start from the beginning is refused

job   megatron, tp2 pp2 dp2, 4 nodes, distributed optimizer, 100 iterations
runs  with all configurations
when  version 2 is committed on every node
do    kill n1
do    start s1 first
do    kill n3
do    start s3 last
when  the job is refused
then  the reason contains: the parts of ranks 2, 3, 6, 7 are gone with 2 nodes that protect each other
then  the reason contains: RAIM5 makes up for 1
then  the reason contains: --ftp-resume fresh
then  no rank started from scratch
