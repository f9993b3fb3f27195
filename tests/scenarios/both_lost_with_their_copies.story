Two nodes are killed at once that keep each other's copies; parity, which the same snapshots fed, has what they held

job   megatron, tp2 pp2 dp2, 4 nodes, distributed optimizer, 80 iterations
flags --baft --reft-redundancy both
when  version 14 is committed on every node
do    kill n0
do    kill n1
do    start s0 first
do    start s1 last
when  the job has ended
then  s0 restored from node, iteration >= 14
then  s1 restored from node, iteration >= 14
then  copies went out in bubbles
then  the final state is golden
