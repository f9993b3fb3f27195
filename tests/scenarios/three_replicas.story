One of three data-parallel replicas is killed

job   megatron, tp2 pp2 dp3, 3 nodes, distributed optimizer, global batch 12
runs  with all configurations
when  version 2 is committed on every node
do    kill n1
do    start s first
when  the job has ended
then  s restored from node, iteration >= 2
then  the final state is golden
