Two nodes are killed at once, of different sharding groups: 0 and 2 share groups, and so do 1 and 3

job   megatron, tp2 pp2 dp2, 4 nodes, distributed optimizer
runs  with all configurations
when  version 2 is committed on every node
do    kill n0
do    kill n1
do    start s0 first
do    start s1 last
when  the job has ended
then  s0 restored from node, iteration >= 2
then  s1 restored from node, iteration >= 2
then  the final state is golden
