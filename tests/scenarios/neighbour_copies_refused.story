Two nodes that are neighbours are lost: one of them kept the copy of the other

job   megatron, tp2 pp2 dp2, 4 nodes, distributed optimizer, 100 iterations
flags --reft-redundancy neighbour
runs  with all configurations
when  version 2 is committed on every node
do    kill n2
do    start s1 first
do    kill n3
do    start s3 last
when  the job is refused
then  the reason contains: the parts of ranks 4, 5, 6, 7 are gone with 2 nodes that protect each other
then  the reason contains: --ftp-resume fresh
then  no rank started from scratch
