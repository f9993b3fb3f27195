Two nodes of one sharding group are killed: parity cannot make up for both, the newest checkpoint in storage does

job    megatron, tp2 pp2 dp2, 4 nodes, distributed optimizer, 14 iterations
store  every 3 iterations
when   version 2 is committed on every node
when   checkpoint 3 is complete
do     kill n1
do     start s1 first
do     kill n3
do     start s3 last
when   the job has ended
then   every node restored from storage, iteration >= 3
then   the reason contains: the parts of ranks 2, 3, 6, 7 are gone with 2 nodes that protect each other, RAIM5 makes up for 1
then   no rank started from scratch
then   complete checkpoints are intact, the newest >= 12
then   the final state is golden
