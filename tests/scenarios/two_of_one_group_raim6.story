Two nodes of one sharding group are killed at once: RAIM6 makes up for both

job    megatron, tp2 pp2 dp4, 4 nodes, distributed optimizer
flags  --reft-redundancy raim6
runs   with all configurations
when   version 2 is committed on every node
do     kill n0
do     kill n2
do     start s0 first
do     start s2 last
when   the job has ended
then   s0 restored from node, iteration >= 2
then   s2 restored from node, iteration >= 2
then   the final state is golden
