import torch
from torchvision.models import vit_b_16
from lightning_tricks import count_flops
cost = count_flops(vit_b_16(), torch.empty(1, 3, 224, 224), backward=True)
print(cost)
